"""For the people in the room: checks of machines, the guide's numbers, the notebook."""
