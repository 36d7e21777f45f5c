"""What core's default runtime is made of: plain data, synchronous stand-ins, the host, any torch accelerator."""
