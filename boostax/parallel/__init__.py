"""Exchange between devices, and runs over several processes."""
