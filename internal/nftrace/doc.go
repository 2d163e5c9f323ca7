// Package nftrace follows real packets through the rules of nf_tables on a node, for package
// packettrace, and compares their way with what Explain says.
//
// While Trace runs there is a table "serviceplane-trace-…" in the IP family of the packet. Its
// first chains set nftrace for the packets that match, and for no others; its chains at the
// begin and the end of each hook record that a packet came that far, and its addresses there.
// The kernel sends an event for each rule that such a packet matches, as for nft monitor trace.
// The table accepts everything.
//
// The kernel deletes the table with the socket that made it, also if the program is killed
// (since Linux 5.12). With an older kernel, the next Trace in the network namespace deletes
// what a killed program has left there.
package nftrace
