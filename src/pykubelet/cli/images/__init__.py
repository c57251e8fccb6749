"""Commands on images and registries: `pykubelet images …`, `login` and `logout`."""
