"""A failing call in a folder, and the folder run again."""
