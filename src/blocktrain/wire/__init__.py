"""Wire: what travels between machines, as bytes and back, checked. No sockets and no files. Next: safetensors.py."""
