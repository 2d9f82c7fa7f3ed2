"""The kinds of events, one file for each: when a reading is one, and what the report says then."""
