"""Makes the checkout importable in processes that the runner starts, such as Ray's actors."""

import checkout

checkout.install()
