// Package nftables is the engine behind the public package of that name, whose
// documentation draws the table, and in front of the virtual servers of ipvs: see Front.
package nftables
