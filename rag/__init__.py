"""The offline knowledge base."""
