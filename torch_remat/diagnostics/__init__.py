"""What a program can be asked about its checkpoints."""
