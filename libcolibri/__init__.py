"""colibri: run Mixture-of-Experts models bigger than memory."""

__version__ = "0.1.0"
