"""Files of rows, wherever they lie and whatever their format, as one stream of records."""
