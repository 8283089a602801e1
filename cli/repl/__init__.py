"""The interactive loop."""
