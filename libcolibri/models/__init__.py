"""Model families on one decoder."""
