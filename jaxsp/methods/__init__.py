"""Each published method as a schedule of phases built from the other parts."""
