"""The `deepinfer` command; one module a sub-command, imported only when it is asked for."""
