#include "machine.h"
const HandlerEntry tcgen05_handlers[] = {{0}};
