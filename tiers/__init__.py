"""The places where bytes live, behind one Tier protocol."""
