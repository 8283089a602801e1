"""From published checkpoints to model directories."""
