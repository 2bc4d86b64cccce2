"""The refit protocol without I/O: messages in, messages and effects out."""
