"""The number formats, one file each."""
