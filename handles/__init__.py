"""What checkpoints are made of: pure frozen values, no I/O."""
