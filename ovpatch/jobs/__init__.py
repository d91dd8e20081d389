"""Starting somebody's training command as a child, and what is handed down to its processes."""
