"""What a checkpoint is: its claim and identity, its file, the shelf it lies on, and weights carried over by name."""
