"""Short periods of garbage collection: put this directory on the PYTHONPATH of a kubelet."""

import pykubelet.images.image_gc

pykubelet.images.image_gc.PERIOD_SECONDS = 1.0
