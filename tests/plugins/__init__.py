"""What the tests' CSI driver, device plugin and DRA driver have in common: real processes that misbehave."""
