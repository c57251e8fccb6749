"""CPU manager: exclusive CPUs of Guaranteed containers, and the shared pool."""
