"""What moves the bytes of a refit: control messages over sockets, tensors over shared memory."""
