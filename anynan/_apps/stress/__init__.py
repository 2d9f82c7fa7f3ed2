"""Hunt for inputs that make NaN or Inf before they come by themselves."""
