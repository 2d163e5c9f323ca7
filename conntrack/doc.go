// Package conntrack deletes the entries of connection tracking that send a client
// where its Service does not lead any more.
//
// A UDP client that keeps its socket busy keeps its entry alive, and with it the
// endpoint that was chosen for its first datagram: also after that endpoint is
// gone, after the Service is deleted, and when there was no Service yet and the
// datagrams went nowhere. Judge says which entries are stale, given what the
// Services are now; Cleaner deletes them over netlink. TCP ends by itself.
//
// Nothing valid is deleted: endpoints that terminate but still serve keep their
// flows, and so do policies and topology, which are for new connections only.
//
// A Cleaner is a proxier.Conntrack, which the engines of this library for a kernel have
// unless told otherwise; Sysctls sets the limits of connection tracking, as kube-proxy
// does. Judge is pure and builds everywhere; the others work on Linux only.
package conntrack
