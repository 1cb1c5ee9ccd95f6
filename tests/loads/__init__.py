"""What the recordings in tests/recordings/loads and warm are made of, and made by: `make lab`."""
