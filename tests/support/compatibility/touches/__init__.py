"""The touches, by their nouns, in the order of the page."""

from tests.support.compatibility.touches.autograd import AUTOGRAD
from tests.support.compatibility.touches.close import CLOSE
from tests.support.compatibility.touches.copies import COPIES
from tests.support.compatibility.touches.gradients import GRADIENTS
from tests.support.compatibility.touches.modules import MODULES
from tests.support.compatibility.touches.optimizers import OPTIMIZERS
from tests.support.compatibility.touches.reads import READS
from tests.support.compatibility.touches.writes import WRITES

SECTIONS = [READS, WRITES, AUTOGRAD, GRADIENTS, OPTIMIZERS, MODULES, COPIES, CLOSE]
