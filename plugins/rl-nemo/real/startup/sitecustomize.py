"""Makes the checkout importable in processes that the runner starts, such as Ray's actors."""

import os

import checkout

if checkout.VARIABLE in os.environ:
    checkout.install(os.environ[checkout.VARIABLE])
