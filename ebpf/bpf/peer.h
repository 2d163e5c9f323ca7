/* SPDX-License-Identifier: MIT OR GPL-2.0-only */

/* What sockets remember of the VIPs that they use. */

#ifdef IPV6
#define WORDS 4 /* of an address */
#else
#define WORDS 1
#endif

/* What a socket was connected to, or has sent to, and where that led. */
struct peer {
	__be32 vip[WORDS];
	__be32 endpoint[WORDS];
	__be16 vip_port;      /* 0: nothing */
	__be16 endpoint_port; /* 0: the rules have the VIP */
	__u32 service;
	__u64 range;
};

/* A UDP socket may be connected, and send to other addresses too. All programs that read or write it
 * hold the lock of the socket. */
struct datagrams {
	struct peer connected;
	struct peer sent[2];
};
