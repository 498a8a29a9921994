"""The node daemon: owns the host arena, the copies and the operations, and serves them on a unix socket."""
