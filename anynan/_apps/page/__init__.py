"""One run as one page of HTML that stands alone."""
