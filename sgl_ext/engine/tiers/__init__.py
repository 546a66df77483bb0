"""The tiers of memory below the device's: host copies of pins, and pages that engines share."""
