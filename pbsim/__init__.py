"""pbsim: cycle-level simulation of hardware on which a network trains sample by sample."""
