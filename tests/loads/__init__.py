"""What the recordings in tests/recordings/loads are made of, and made by: `make lab`."""
