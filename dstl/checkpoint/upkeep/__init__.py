"""Upkeep of a location: listing, verification and cleaning, with or without a running job."""
