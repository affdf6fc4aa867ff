"""What people write to start nodes: reading it, what is wrong with it, and starting it."""
