"""Starting and stopping the servers that ours is measured against."""
