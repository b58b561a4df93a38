"""`python -m services.mesh.supervisor <service>`: one line of the Procfile."""

import sys

from services.mesh.supervisor.supervisor import main

if __name__ == "__main__":
    sys.exit(main())
