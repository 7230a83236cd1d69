#include "machine.h"
const HandlerEntry tmem_handlers[] = {{0}};
void tmem_at_exit(Cta *cta) { (void)cta; }
void tmem_load_used(Warp *w, u32 clock) { knows_of(&w->know, actor_of(w, BY_TMEM), clock); }
bool tmem_explain_block(Warp *w, const Ins *i, char *text, size_t size) { return false; }
