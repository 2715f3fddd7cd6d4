"""The commands of ``nerite``, one file each, and the command line they share. Flags in, one call down."""
