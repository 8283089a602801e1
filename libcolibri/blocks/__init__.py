"""What layers are composed of: one file per kind of block, each a frozen config that names its tensors and records its operations."""
