"""CSI: volumes that driver processes beside the agent give, asked over their sockets."""
