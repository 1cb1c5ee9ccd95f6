"""The only room with state and time: ticks, and the board that holds the latest assessment."""
