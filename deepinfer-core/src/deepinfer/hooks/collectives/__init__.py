"""What core's default communicator is made of: torch process groups, gather sessions, messages between ranks."""
