"""Wire: how what we make becomes bytes and comes back, checked. No sockets and no files. Next: tensors.py."""
