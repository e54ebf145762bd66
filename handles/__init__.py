"""The parts of checkpoints: pure frozen values, no I/O."""
