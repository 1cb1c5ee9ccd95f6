"""The outside -> typed values. Whatever goes wrong out there comes back as a `SourceFailure`."""
