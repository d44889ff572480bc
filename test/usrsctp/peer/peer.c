// SPDX-License-Identifier: Apache-2.0
// An SCTP peer in userspace, over raw sockets, by Debian's libusrsctp: for kernels without
// SCTP. Package usrsctp runs it.
//
//   peer serve NAME PORT=ADDRESS,ADDRESS...      answers each message with the same one,
//                                                and "who?" with its name, the client,
//                                                and how many addresses that has
//   peer connect ADDRESS PORT COUNT SIZE HOW FROM-PORT FROM...
//                                                asks who, sends messages, then ends as HOW
//                                                says: close, abort, or wait (for a line,
//                                                then as many messages again, and close)
//
// A server may have several PORT=ADDRESS,ADDRESS... No address leaves the choice to the
// library: it then lists all addresses of the host. A host has one peer: another one would
// answer its packets with ABORTs.
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <usrsctp.h>

enum { STREAMS = 10, LARGEST = 1 << 20, PROTOCOL = 46 };

static _Thread_local char buffer[LARGEST];

static void die(const char *what)
{
	printf("%s: %s\n", what, strerror(errno));
	fflush(stdout);
	_exit(1);
}

static socklen_t parse(struct sockaddr_storage *to, const char *address, int port)
{
	struct sockaddr_in *v4 = (struct sockaddr_in *)to;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)to;
	memset(to, 0, sizeof(*to));
	if (inet_pton(AF_INET, address, &v4->sin_addr) == 1) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons(port);
		return sizeof(*v4);
	}
	if (inet_pton(AF_INET6, address, &v6->sin6_addr) != 1)
		die(address);
	v6->sin6_family = AF_INET6;
	v6->sin6_port = htons(port);
	return sizeof(*v6);
}

static const char *text(const struct sockaddr_storage *a, int *port)
{
	static char address[INET6_ADDRSTRLEN];
	const struct sockaddr_in *v4 = (const struct sockaddr_in *)a;
	const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)a;
	*port = ntohs(v4->sin_port);
	return inet_ntop(a->ss_family, a->ss_family == AF_INET ? (const void *)&v4->sin_addr : (const void *)&v6->sin6_addr, address, sizeof(address));
}

static void set(struct socket *s, int option, int value)
{
	if (usrsctp_setsockopt(s, IPPROTO_SCTP, option, &value, sizeof(value)))
		die("option");
}

// open_at makes a socket at some addresses and a port.
static struct socket *open_at(int type, char **addresses, int count, int port, int family)
{
	struct sockaddr_storage a;
	if (count > 0) {
		parse(&a, addresses[0], port);
		family = a.ss_family;
	}
	struct socket *s = usrsctp_socket(family, type, IPPROTO_SCTP, NULL, NULL, 0, NULL);
	if (!s)
		die("socket");
	set(s, SCTP_RECVRCVINFO, 1);
	set(s, SCTP_NODELAY, 1);
	struct sctp_initmsg init = {.sinit_num_ostreams = STREAMS, .sinit_max_instreams = STREAMS};
	if (usrsctp_setsockopt(s, IPPROTO_SCTP, SCTP_INITMSG, &init, sizeof(init)))
		die("initmsg");
	if (family == AF_INET6) {
		int on = 1;
		usrsctp_setsockopt(s, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
	}
	for (int i = 0; i < count; i++) {
		socklen_t length = parse(&a, addresses[i], port);
		if (i ? usrsctp_bindx(s, (struct sockaddr *)&a, 1, SCTP_BINDX_ADD_ADDR) : usrsctp_bind(s, (struct sockaddr *)&a, length))
			die("bind");
	}
	if (!count && port) {
		socklen_t length = parse(&a, family == AF_INET ? "0.0.0.0" : "::", port);
		if (usrsctp_bind(s, (struct sockaddr *)&a, length))
			die("bind");
	}
	return s;
}

static const char *name;

// listen_at makes the listening socket that an argument describes.
static struct socket *listen_at(char *argument)
{
	char *addresses[16];
	int count = 0, port = atoi(argument);
	strtok(argument, "=");
	for (char *a; count < 16 && (a = strtok(NULL, ","));)
		addresses[count++] = a;
	struct socket *s = open_at(SOCK_SEQPACKET, addresses, count, port, AF_INET);
	if (usrsctp_listen(s, 100))
		die("listen");
	return s;
}

static void *serve(void *listener)
{
	struct socket *s = listener;
	for (;;) {
		struct sockaddr_storage from;
		struct sctp_rcvinfo info;
		socklen_t from_length = sizeof(from), info_length = sizeof(info);
		unsigned int type = 0;
		int flags = 0;
		ssize_t n = usrsctp_recvv(s, buffer, sizeof(buffer), (struct sockaddr *)&from, &from_length, &info, &info_length, &type, &flags);
		if (n <= 0 || type != SCTP_RECVV_RCVINFO)
			continue;
		if (n == 4 && !memcmp(buffer, "who?", 4)) {
			int peer;
			const char *address = text(&from, &peer);
			struct sockaddr *all;
			int known = usrsctp_getpaddrs(s, info.rcv_assoc_id, &all);
			n = sprintf(buffer, "%s %s %d %d", name, address, peer, known);
			if (known > 0)
				usrsctp_freepaddrs(all);
		}
		struct sctp_sndinfo send = {.snd_sid = info.rcv_sid, .snd_ppid = info.rcv_ppid, .snd_assoc_id = info.rcv_assoc_id};
		usrsctp_sendv(s, buffer, n, NULL, 0, &send, sizeof(send), SCTP_SENDV_SNDINFO, 0);
	}
	return NULL;
}

static void run_server(char **arguments, int count)
{
	pthread_t thread;
	struct socket *listeners[16];
	for (int i = 0; i < count && i < 16; i++)
		listeners[i] = listen_at(arguments[i]);
	for (int i = 0; i < count && i < 16; i++)
		pthread_create(&thread, NULL, serve, listeners[i]);
	printf("ready\n");
	for (;;)
		pause();
}

static void send_message(struct socket *s, const char *data, size_t size, int stream)
{
	struct sctp_sndinfo info = {.snd_sid = stream, .snd_ppid = htonl(PROTOCOL)};
	if (usrsctp_sendv(s, data, size, NULL, 0, &info, sizeof(info), SCTP_SENDV_SNDINFO, 0) != (ssize_t)size)
		die("send");
}

// receive reads a message, and expects it whole and on a stream.
static size_t receive(struct socket *s, char *to, size_t most, int stream)
{
	size_t got = 0;
	for (int flags = 0; !(flags & MSG_EOR);) {
		struct sctp_rcvinfo info;
		socklen_t length = sizeof(info);
		unsigned int type = 0;
		flags = 0;
		ssize_t n = usrsctp_recvv(s, to + got, most - got, NULL, NULL, &info, &length, &type, &flags);
		if (n == 0) {
			printf("the association has ended\n");
			fflush(stdout);
			_exit(1);
		}
		if (n < 0)
			die("receive");
		if (info.rcv_sid != stream || ntohl(info.rcv_ppid) != PROTOCOL) {
			printf("stream %d, protocol %u\n", info.rcv_sid, ntohl(info.rcv_ppid));
			fflush(stdout);
			_exit(1);
		}
		got += n;
	}
	return got;
}

static void exchange(struct socket *s, int count, size_t size)
{
	static char expected[LARGEST];
	for (int i = 0; i < count; i++) {
		for (size_t j = 0; j < size; j++)
			expected[j] = (char)(i * 7 + j * 13 + j / 251);
		send_message(s, expected, size, i % STREAMS);
		size_t n = receive(s, buffer, sizeof(buffer), i % STREAMS);
		if (n != size || memcmp(buffer, expected, size)) {
			printf("message %d came back with %zu of %zu bytes, or with others\n", i, n, size);
			fflush(stdout);
			_exit(1);
		}
	}
}

static void finish(struct socket *s)
{
	usrsctp_close(s);
	for (int i = 0; i < 10000 && usrsctp_finish(); i++)
		usleep(1000);
}

static void run_client(char **v, int c)
{
	int port = atoi(v[1]), count = atoi(v[2]);
	size_t size = atoi(v[3]);
	const char *how = v[4];
	struct sockaddr_storage to;
	socklen_t length = parse(&to, v[0], port);
	struct socket *s = open_at(SOCK_STREAM, v + 6, c - 6, atoi(v[5]), to.ss_family);
	if (usrsctp_connect(s, (struct sockaddr *)&to, length))
		die("connect");
	send_message(s, "who?", 4, 0);
	size_t n = receive(s, buffer, sizeof(buffer) - 1, 0);
	struct sockaddr *peers;
	int known = usrsctp_getpaddrs(s, 0, &peers);
	printf("%.*s, %d\n", (int)n, buffer, known);
	exchange(s, count, size);
	printf("exchanged\n");
	if (!strcmp(how, "wait")) {
		char line[16];
		if (fgets(line, sizeof(line), stdin))
			exchange(s, count, size);
		printf("again\n");
	}
	if (!strcmp(how, "abort")) {
		struct linger now = {.l_onoff = 1};
		usrsctp_setsockopt(s, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
	}
	finish(s);
	printf("done\n");
}

static void debug(const char *format, ...)
{
	va_list list;
	va_start(list, format);
	vfprintf(stderr, format, list);
	va_end(list);
}

int main(int c, char **v)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	usrsctp_init(0, NULL, debug);
	usrsctp_sysctl_set_sctp_ecn_enable(0);
	// No packet is lost here. A peer that a busy machine stops for seconds must not make the
	// other one send again: tests count messages.
	usrsctp_sysctl_set_sctp_rto_max_default(20000);
	usrsctp_sysctl_set_sctp_rto_min_default(10000);
	usrsctp_sysctl_set_sctp_rto_initial_default(3000);
	if (c >= 4 && !strcmp(v[1], "serve")) {
		name = v[2];
		run_server(v + 3, c - 3);
	} else if (c >= 8 && !strcmp(v[1], "connect"))
		run_client(v + 2, c - 2);
	else
		return 2;
	fflush(stdout);
	_exit(0);
}
