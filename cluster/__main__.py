"""python -m tinyloop.cluster: the command line where its script is not on the path."""

from .guardian import main

if __name__ == "__main__":
    main()
