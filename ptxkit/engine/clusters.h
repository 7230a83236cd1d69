/* Clusters, their CTAs and warps. */
#pragma once
#include "machine.h"

Cluster *start_cluster(Machine *m); /* the next one of the grid */
void end_cluster(Cluster *c);
